"""What others see of a run, where its maker asks for it.

cards    the README.md of a saved model
publish  pages that are kept on purpose
"""
