"""What benchmarks/fuzz_messages.py is made of: damage, what is damaged, and what is checked afterwards."""
