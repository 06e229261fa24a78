# Foreign sources of fast.cu for the emulator: every asm statement becomes a call of an emulated instruction (perl -0p, a whole file
# at a time). The grid of persistent blocks and the tiles of its order are made small.
s/asm volatile\s*\(\s*"\{\\n"\s*"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16.*?TransB\)\)\);/foreign::wgmma<$1>(&d[0][0], desc_a, desc_b);/gs;
s/asm volatile\("wgmma\.fence.*/foreign::wgmma_fence();/g;
s/asm volatile\("wgmma\.commit.*/emu::commit_products(EMU_HERE);/g;
s/asm volatile\("wgmma\.wait_group.*/emu::wait_products(N, EMU_HERE);/g;
s/asm volatile\("setmaxnreg.*//g;
s/asm volatile\s*\(\s*"mbarrier\.init.*?\n\s*\);/gpu::hopper::mbarrier_init(bar, thread_count + transaction_count);/gs;
s/asm volatile\s*\("mbarrier\.arrive\.expect_tx.*?\(bytes\)\);/gpu::hopper::mbarrier_arrive_expect(bar, bytes);/gs;
s/asm volatile\s*\(\s*"cp\.async\.bulk\.tensor\.5d.*?\n\s*\);/foreign::load(dst, src_tma_map, bar, global_row_idx, global_col_idx);/gs;
s/asm volatile\s*\(\s*"\{\\n"\s*"\.reg \.pred.*?"r"\(kPhaseBit\)\s*\);/gpu::hopper::mbarrier_wait(bar, kPhaseBit);/gs;
s/asm volatile\s*\(\s*"mbarrier\.arrive\.release.*?\n\s*\);/foreign::arrive(bar, count);/gs;
s/__shared__ (?:__align__\(8\) )?(uint64_t|barrier) full\[QSIZE\], empty\[QSIZE\];/auto *full = foreign::static_shared<$1>(0), *empty = full + QSIZE;/g;
s/__shared__ barrier barA, barB;|__shared__ barrier barA;\s*__shared__ barrier barB;/auto &barA = *foreign::static_shared<barrier>(0), &barB = (&barA)[1];/g;
s/__shared__ alignas\(128\) bf16 sA\[(.*?)\];/auto& sA = *foreign::static_shared<bf16[$1]>(1024);/g;
s/__shared__ alignas\(128\) bf16 sB\[(.*?)\];/auto& sB = *foreign::static_shared<bf16[$1]>(1024 + sizeof sA);/g;
s/extern __shared__ (SMem<[^>]*>) s;/auto& s = *($1*)emu::block().shared;/g;
s/extern __shared__ __align__\(128\) uint8_t smem\[\];/unsigned char* smem = emu::block().shared;/g;
s/NUM_SM = 128/NUM_SM = 3/g;
s/BN, 16, 8> schedule/BN, 2, 2> schedule/g;
s/>\s*\n\s*<<</><<</g;
s/\n\s*\/\*[A-Z_0-9]+\*\/ */ /g;
