"""LLM judges behind any server with an OpenAI-compatible chat API.

server_judge  all questions: cost estimate, concurrency, and up to two attempts for each
client        one question: its requests and retries, until it has a reply
replies       what servers send: completions and errors, and what to do about an error
cache         replies, which are on disk before they are used, and their cost
budget        prices and the spending limit
"""
