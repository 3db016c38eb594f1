"""A batch server made of the engine's own parts, whose techniques can be turned off one by one."""
