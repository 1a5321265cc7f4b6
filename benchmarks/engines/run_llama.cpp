// llama.cpp on a CPU: run_llama MODEL.gguf NEW < PROMPTS > OUT
//
// PROMPTS has one prompt a line, as token ids.  OUT has for each prompt the FP32 logits [tokens, vocabulary] and NEW
// greedy ids (int32).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char **argv) {
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  llama_backend_init();
  llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  llama_model *model = llama_model_load_from_file(argv[1], model_params);
  if (argc != 3 || !model) return 1;
  const int size = llama_vocab_n_tokens(llama_model_get_vocab(model)), wanted = atoi(argv[2]);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::vector<llama_token> ids;
    for (llama_token id; words >> id;) ids.push_back(id);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) return 2;
    std::vector<llama_token> text;
    for (size_t at = 0; at < ids.size() + wanted - 1; ++at) {
      llama_token id = at < ids.size() ? ids[at] : text.back();
      if (llama_decode(context, llama_batch_get_one(&id, 1))) return 3;
      const float *logits = llama_get_logits_ith(context, -1);
      if (at < ids.size()) fwrite(logits, sizeof(float), size, stdout);
      if (at + 1 >= ids.size()) text.push_back(std::max_element(logits, logits + size) - logits);
    }
    fwrite(text.data(), sizeof(llama_token), text.size(), stdout);
    llama_free(context);
  }
  return 0;
}
