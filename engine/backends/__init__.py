"""What executes a program: one module a backend."""
