//! What a machine of `slipgate run` says of itself on the line that ties its VM to it.
//!
//! Who has a line may write anything: what is no notice is passed over, and of one who sends a line
//! that is too long nothing is read any more.
use std::time::Instant;

use slipgate_ipc::{
    api::Event,
    client::{MAX_NOTICE, MachineEvent, MachineNotice, MachineStatus},
};

/// What is known of the machine behind a VM.
#[derive(Debug, Default)]
pub(super) struct TiedMachine {
    /// The beginning of a notice.
    buffer: Vec<u8>,
    /// What it said last, and when.
    known: Option<(MachineStatus, Instant)>,
    /// Whether it has said that it ended.
    has_ended: bool,
    /// Whether what it sends is passed over.
    is_ignored: bool,
}

impl TiedMachine {
    /// Takes what the client of this VM has sent. Adds what has happened to `events`.
    pub(super) fn take(&mut self, vm: &str, bytes: &[u8], events: &mut Vec<Event>) {
        if self.is_ignored {
            return;
        }
        self.buffer.extend_from_slice(bytes);
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            if let Ok(notice) = serde_json::from_slice::<MachineNotice>(&line) {
                self.note(vm, notice, events);
            }
        }
        if self.buffer.len() >= MAX_NOTICE {
            tracing::warn!("the client of {vm} sends what is no notice");
            self.is_ignored = true;
            self.buffer = Vec::new();
        }
    }

    fn note(&mut self, vm: &str, notice: MachineNotice, events: &mut Vec<Event>) {
        let MachineNotice { mut machine, event } = notice;
        // It is the VM's, whatever it calls itself.
        machine.name = vm.to_owned();
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
    pub(super) fn status(&self) -> Option<MachineStatus> {
        let (status, at) = self.known.as_ref().filter(|_| !self.has_ended)?;
        let mut status = status.clone();
        if status.runs_s > 0 || status.state != slipgate_ipc::client::MachineState::Starting {
            status.runs_s = status.runs_s.saturating_add(at.elapsed().as_secs());
        }
        Some(status)
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
