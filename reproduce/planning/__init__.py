"""What a configuration needs, before anything is allocated: memory, disk, work, and what would make it fit."""
