"""What others see of a run, where its maker asks for it.

cards    the README.md of a saved model
publish  pages that are kept on purpose
index    the list of all published pages, and the README's table of numbers
push     models, cards and pages to the Hugging Face hub
"""
