// Does nothing: asked how many clusters of such blocks, one to an SM, the GPU holds at once.
extern "C" __global__ void __launch_bounds__(256, 1) probe() {}
