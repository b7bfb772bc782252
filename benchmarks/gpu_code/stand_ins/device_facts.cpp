// What torch's C++ asks of a device, answered for one H100; preloaded, so that it comes before torch's own functions.
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <driver_types.h>

#include <cstring>

namespace {

cudaDeviceProp* properties() {
  static cudaDeviceProp found = [] {
    cudaDeviceProp p;
    std::memset(&p, 0, sizeof p);
    std::strcpy(p.name, "NVIDIA H100 80GB HBM3");
    p.major = 9;
    p.minor = 0;
    p.multiProcessorCount = 132;
    p.warpSize = 32;
    p.sharedMemPerBlock = 48 << 10;
    p.sharedMemPerBlockOptin = 227 << 10;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 2048;
    p.regsPerBlock = 1 << 16;
    p.totalGlobalMem = 80ull << 30;
    return p;
  }();
  return &found;
}

}  // namespace

namespace c10::cuda {
signed char device_count() noexcept { return 1; }
signed char device_count_ensure_non_zero() { return 1; }
signed char current_device() { return 0; }
}  // namespace c10::cuda

namespace at::cuda {
cudaDeviceProp* getCurrentDeviceProperties() { return properties(); }
cudaDeviceProp* getDeviceProperties(signed char) { return properties(); }
}  // namespace at::cuda

// The choice of attention's kernel: flash attention for half precision without a mask, otherwise the other fused one.
namespace sdp {
bool can_use_cudnn_attention(const sdp_params&, bool) { return false; }
bool can_use_flash_attention(const sdp_params& params, bool) {
  const auto dtype = params.query.scalar_type();
  return (dtype == at::kHalf || dtype == at::kBFloat16) && !params.attn_mask.has_value();
}
bool can_use_mem_efficient_attention(const sdp_params&, bool) { return true; }
bool is_flash_attention_available() { return true; }
}  // namespace sdp
