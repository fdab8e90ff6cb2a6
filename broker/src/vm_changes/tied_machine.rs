//! Reads a machine's notices about itself, on the socket that ties its VM to the daemon.
//!
//! Whoever has the other end may write anything: what is no notice is passed over, after a line that is
//! too long nothing is read any more, and the process id is the one that the kernel says.
use std::time::Instant;

use slipgate_ipc::{
    api::Event,
    client::{MachineEvent, MachineNotice, MachineStatus, NoticeLines},
};

/// State of the machine behind a VM, as its notices give it.
#[derive(Debug, Default)]
pub(crate) struct TiedMachine {
    /// The process that made the socket; 0: it has no id in this PID namespace.
    pid: u32,
    lines: NoticeLines,
    /// Last notice, and its time.
    known: Option<(MachineStatus, Instant)>,
    /// Whether it has said that it ended.
    has_ended: bool,
}

impl TiedMachine {
    /// Nothing is known yet of the machine of this process.
    pub(crate) fn of(pid: u32) -> Self {
        Self {
            pid,
            ..Self::default()
        }
    }

    /// Takes what the client of this VM has sent. Adds what has happened to `events`.
    pub(crate) fn take(&mut self, vm: &str, bytes: &[u8], events: &mut Vec<Event>) {
        let was_over = self.lines.is_over();
        for notice in self.lines.take(bytes) {
            self.note(vm, notice, events);
        }
        if self.lines.is_over() && !was_over {
            tracing::warn!("the client of {vm} sends messages that are not notices");
        }
    }

    fn note(&mut self, vm: &str, notice: MachineNotice, events: &mut Vec<Event>) {
        let MachineNotice { mut machine, event } = notice;
        // It is the VM's and the process's, whatever it says.
        machine.name = vm.to_owned();
        machine.pid = self.pid;
        self.known = Some((machine, Instant::now()));
        let vm = vm.to_owned();
        events.extend(match event {
            None => None,
            Some(MachineEvent::Paused) => Some(Event::MachinePaused { vm }),
            Some(MachineEvent::Resumed) => Some(Event::MachineResumed { vm }),
            Some(MachineEvent::Saved) => Some(Event::MachineSaved { vm }),
            Some(MachineEvent::Ended { .. }) if self.has_ended => None,
            Some(MachineEvent::Ended { outcome, exit_code }) => {
                self.has_ended = true;
                Some(Event::MachineEnded {
                    vm,
                    outcome: Some(outcome),
                    exit_code: Some(exit_code),
                })
            }
        });
    }

    /// The machine as it is now; `None`: the VM's machine is another program's, or has ended.
    pub(crate) fn status(&self) -> Option<MachineStatus> {
        let (status, at) = self.known.as_ref().filter(|_| !self.has_ended)?;
        let mut status = status.clone();
        if status.runs_s > 0 || status.state != slipgate_ipc::client::MachineState::Starting {
            status.runs_s = status.runs_s.saturating_add(at.elapsed().as_secs());
        }
        Some(status)
    }

    /// Whether it has said that it ended.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Its client has gone.
    pub(super) fn gone(&mut self, vm: &str, events: &mut Vec<Event>) {
        if self.status().is_some() {
            self.has_ended = true;
            events.push(Event::MachineEnded {
                vm: vm.to_owned(),
                outcome: None,
                exit_code: None,
            });
        }
    }
}

#[cfg(test)]
#[path = "tied_machine_test.rs"]
mod tests;
