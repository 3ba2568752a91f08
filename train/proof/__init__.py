"""Are two runs equal, where do they part, and does what was saved go on elsewhere?"""
