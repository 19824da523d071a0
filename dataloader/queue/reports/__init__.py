"""What the queue tells people and monitoring: lists, searches, figures, predictions, alerts. Most of it only reads."""
