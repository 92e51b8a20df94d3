// Threads of ours: signals are for the threads of the program (LC-4).
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace simpler {

// Starts a thread with every signal blocked, named for ps and top (cut to 15 bytes). Throws
// std::system_error.
std::thread start_quiet_thread(const std::string& name, std::function<void()> body);

}  // namespace simpler
