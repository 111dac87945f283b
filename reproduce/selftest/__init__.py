"""Deliberate faults in copies of a small real run: is each found, and called what it is?"""
