"""What does a trained model say?"""
