"""What all endpoints share: who may ask, what is refused, sessions, waiting."""
