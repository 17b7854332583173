"""Run-time patches of third-party libraries, one module for each library."""
