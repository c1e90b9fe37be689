"""CUDA by Triton: kernels.py has the device code, launch.py what calls it; plan.py a forward as device tensors."""
