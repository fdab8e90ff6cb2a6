//! The parts of the broker that requests and changes work with.
use slipgate_ipc::{
    api::Event,
    client::{ClientAnswer, ClientId, ControlServer, VmChange},
};

use crate::{kernel_state::Attached, process::Engines};

/// The kernel state, the engine processes and the control socket.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) attached: Attached,
    pub(crate) engines: Engines,
    pub(crate) control: ControlServer,
    /// Number of the last request to another process.
    last_id: u64,
}

impl Parts {
    pub(crate) fn new(attached: Attached, engines: Engines, control: ControlServer) -> Self {
        Self {
            attached,
            engines,
            control,
            last_id: 0,
        }
    }

    /// Returns the number of the next request to another process.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Refuses a client's request with a reason.
    pub(crate) fn refuse(&mut self, client: ClientId, why: impl Into<String>) {
        self.control.answer(client, &ClientAnswer::error(why));
    }

    /// Answers with the present state of a VM.
    pub(crate) fn answer_vm(&mut self, client: ClientId, at: usize, change: VmChange) {
        let vm = Box::new(self.attached.vm_status(&self.attached.vms[at]));
        if change == VmChange::Changed {
            let vm = vm.definition.name.clone();
            self.attached.events.push(Event::VmChanged { vm });
        }
        self.control
            .answer(client, &ClientAnswer::Vm { vm, change });
    }
}
