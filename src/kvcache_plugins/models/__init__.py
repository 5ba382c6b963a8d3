"""What is known of a model: its name or package, its fingerprint, and which of its layers a method may replace."""
