// A rollout worker in one process: settings from the environment, an exit code that says how it ended.
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "faults.h"
#include "session.h"
#include "worker.h"

namespace {

std::string Setting(const char* name, const std::string& otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

std::uint32_t Count(const char* name, std::uint32_t otherwise, std::uint32_t least) {
  const auto text = Setting(name, std::to_string(otherwise));
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc{} && end == text.data() + text.size() && value >= least) return value;
  throw Exit(kConfiguration,
             std::string(name) + " must be an integer of at least " + std::to_string(least) + ", not " + text);
}

struct Settings {
  Place place;
  std::uint32_t in_flight;
};

Settings ReadSettings() {
  Settings settings{
      .place =
          {
              .address = Setting("COSMOS_CTRL_ADDRESS", ""),
              .execution_id = Setting("COSMOS_CTRL_EXECUTION_ID", ""),
              .group = Setting("COSMOS_CTRL_GROUP", "rollout"),
              .replica = Count("COSMOS_CTRL_REPLICA", 0, 0),
          },
      .in_flight = Count("COSMOS_CTRL_IN_FLIGHT", 8, 1),
  };
  if (settings.place.address.empty()) throw Exit(kConfiguration, "COSMOS_CTRL_ADDRESS is not set");
  return settings;
}

// Whatever other threads are at, nothing is sent any more.
[[noreturn]] void Leave(ExitCode code, const std::string& why) {
  std::cerr << why << std::endl;
  std::_Exit(code);
}

// Runs `work`, on whatever thread: what ends it ends the process, before anything that another thread uses is
// destroyed.
template <class Work>
auto OrLeave(Work work) {
  try {
    return work();
  } catch (const Exit& exit) {
    Leave(exit.code, exit.what());
  } catch (const std::exception& error) {
    Leave(kFailed, error.what());
  }
}

sigset_t Sigterm() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  return set;
}

void StopOnSigterm(Worker& worker) {
  const auto set = Sigterm();
  int signal = 0;
  sigwait(&set, &signal);
  worker.Stop();
  const timespec grace{.tv_sec = kEndTime.count(), .tv_nsec = 0};
  const bool again = sigtimedwait(&set, nullptr, &grace) == SIGTERM;
  Leave(kFailed, again ? "told to stop twice" : "could not end in time after SIGTERM");
}

}  // namespace

int main() {
  // Blocked before any thread starts, so that only the one that waits for it meets it.
  const auto set = Sigterm();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  const auto [place, in_flight] = OrLeave(ReadSettings);
  Session session(place);
  Worker worker(session, in_flight);
  std::thread([&] { StopOnSigterm(worker); }).detach();
  OrLeave([&] {
    session.Register();
    std::thread([&] { OrLeave([&] { worker.reporter().Run(); }); }).detach();
    worker.Run();
  });
  std::_Exit(kDone);
}
