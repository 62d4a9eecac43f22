"""From maps to what a person looks at."""
