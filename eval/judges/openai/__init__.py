"""The judge behind any server that speaks the OpenAI chat protocol.

server_judge  from a comparison to its reply
client        one question, until it has a reply or a reason for none
replies       what servers send: completions, and errors in whatever place
cache         replies on disk before anyone uses them, and what they cost
budget        prices and the cap
"""
