"""The processes that start ranks, and what a rank does. Only this part of launch imports torch."""
