"""The operations a program is made of; one module each: shape rule, forward, backward, reference."""
