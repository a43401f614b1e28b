"""What is worth measuring: features, models and their evaluation."""
