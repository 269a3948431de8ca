"""Tools and environments that the policy of an on-policy trainer calls while it writes an answer.
They run in processes of their own, each call with a deadline."""
