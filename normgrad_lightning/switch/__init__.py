"""Where version 0.2.0 kept its entry point."""
