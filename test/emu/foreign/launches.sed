# Launches K<<<...>>>(...) and dynamic shared memory of foreign CUDA sources, as g++ takes them (sed -E).
/<<<[^>]*$/{N;s/\n */ /}
s/extern __shared__ ([a-z]+)\*? *([a-z]+)\[\];/\1* \2 = (\1*)emu::block().shared;/
s/dim3 (grid|block)Dim/dim3 \1_dim/
s/<<<gridDim, blockDim>>>/<<<grid_dim, block_dim>>>/
/<<</s/NULL/nullptr/g
s/([A-Za-z_][A-Za-z0-9_:]*(<[^<>()]*>)?) ?<<<(.*)>>> *(\(|$)/foreign::configure("\1", [=](auto... a_) { \1(a_...); }, {\3})\4/
