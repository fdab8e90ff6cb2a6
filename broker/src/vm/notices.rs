//! Notices of a machine to the daemon that serves its VM: what it is, and when its guest is paused,
//! goes on, was saved or has ended. So the daemon lists its machines without asking one, and its
//! clients get events of orders that were given by whatever way.
//!
//! It tells it on the socket that ties the VM to this process. A notice that finds no room, because the
//! daemon hangs, is lost; the next one says what the machine does by then.
use std::{io::Write as _, os::unix::net::UnixStream};

use slipgate_ipc::client::{MAX_NOTICE, MachineEvent, MachineNotice, MachineStatus};

/// The socket to the daemon.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// Non-blocking; `None`: no daemon serves the VM.
    line: Option<UnixStream>,
}

impl Notices {
    /// Sends further notices by this line.
    pub(super) fn go_by(&mut self, line: UnixStream) {
        self.line = Some(line);
    }

    /// Tells the daemon, if there is one.
    pub(super) fn tell(&mut self, machine: MachineStatus, event: Option<MachineEvent>) {
        let Some(line) = &mut self.line else {
            return;
        };
        let Ok(mut text) = serde_json::to_vec(&MachineNotice { machine, event }) else {
            return;
        };
        text.push(b'\n');
        if text.len() > MAX_NOTICE {
            return tracing::warn!("a notice to the daemon is too long");
        }
        match line.write(&text) {
            Ok(sent) if sent == text.len() => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                tracing::debug!("the daemon reads no notices");
            }
            // Half a line would spoil the next one; and a daemon that has ended needs none.
            Ok(_) | Err(_) => self.line = None,
        }
    }
}

#[cfg(test)]
#[path = "notices_test.rs"]
mod tests;
