"""What can befall a step or a rank, how is it noticed, and what is done about it?"""
