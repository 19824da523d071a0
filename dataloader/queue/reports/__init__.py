"""Reports for people and monitoring: lists, searches, figures, predictions, alerts. Most modules only read."""
