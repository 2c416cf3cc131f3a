"""The judge behind any server that speaks the OpenAI chat protocol.

server_judge  all questions: the estimate, concurrency, and two attempts for each
client        one question: the loop of its requests, until it has a reply
replies       what servers send: completions, and errors with what to do about them
cache         replies on disk before anyone uses them, and what they cost
budget        prices and the spending limit
"""
