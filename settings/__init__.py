"""Every setting of every role, declared once: type, default, range, unit and one line of help.

`keys` holds the machinery; each other module declares the settings of one package. All packages may import this one; it
imports none of them, so that a command shows its help without loading a compiler or a model library.
"""
