"""How long until a small convolutional network reaches 99.0 % on MNIST: a tuned loop in plain PyTorch, and a recipe?

python benchmarks/quality/mnist.py --data mnist.npz
"""
