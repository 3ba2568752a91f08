"""Are two runs equal to the last bit?"""
