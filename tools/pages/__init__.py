"""Every page and every GET of the API at size: `python -m tools.pages --jobs 1000000` (see __main__.py).

history     fills a database with so many jobs of a week, and with hostile texts
addresses   an address, or several, of each GET route of the application
timing      how long the answers take
looks       pictures, accessibility and harmlessness of the pages, in Chromium
"""
