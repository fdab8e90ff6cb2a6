//! Handles the exits of a vCPU.
use std::slice;

use kvm_bindings::{KVM_EXIT_IO_IN, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, kvm_run};
use kvm_ioctls::VcpuExit;

use super::Vcpu;
use crate::{
    counters::{Count, VcpuCounters},
    machine::{Answer, Bus, Outcome},
    report::{Access, Cause, Space},
};

impl Vcpu {
    /// Runs the guest up to its next exit (`KVM_RUN`), and handles the exit. An outcome or a cause
    /// ends the machine.
    pub(super) fn run_guest(&mut self) -> Result<Option<Outcome>, Cause> {
        let shared = &self.shared;
        self.is_between = false;
        let counters = &shared.counters.vcpus[usize::from(self.index)];
        // All exits are matched here: an exit borrows the descriptor, so it can't be passed on.
        let other = match self.fd.run() {
            Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => {
                let (access, answer) = port_access(self.fd.get_kvm_run(), &shared.bus, counters);
                return Ok(self.accessed(access, answer));
            }
            Ok(VcpuExit::MmioRead(address, into)) => {
                counters.mmio_reads.one();
                let access = mmio(address, into.len(), false);
                let answer = shared.bus.mmio_read(address, into);
                return Ok(self.accessed(access, answer));
            }
            Ok(VcpuExit::MmioWrite(address, bytes)) => {
                counters.mmio_writes.one();
                let access = mmio(address, bytes.len(), true);
                let answer = shared.bus.mmio_write(address, bytes);
                return Ok(self.accessed(access, answer));
            }
            Ok(VcpuExit::Intr) => {
                self.is_between = true;
                counters.interrupted.one();
                return Ok(None);
            }
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => {
                Ok(Some(Outcome::PoweredOff))
            }
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Ok(Some(Outcome::Reset)),
            Ok(VcpuExit::SystemEvent(kind, _)) => Err(Cause::SystemEvent { kind }),
            Ok(VcpuExit::Shutdown) => Err(Cause::TripleFault),
            Ok(VcpuExit::FailEntry(hardware_reason, _)) => {
                Err(Cause::FailedEntry { hardware_reason })
            }
            Ok(VcpuExit::MemoryFault { gpa: address, .. }) => Err(Cause::MemoryFault { address }),
            Ok(VcpuExit::InternalError) => Err(internal_error(self.fd.get_kvm_run())),
            Ok(_) => {
                let reason = self.fd.get_kvm_run().exit_reason;
                Err(Cause::UnknownExit { reason })
            }
            Err(error) => match error.errno() {
                // A kick, or another signal; or an application processor that received its SIPI.
                libc::EINTR | libc::EAGAIN => {
                    counters.interrupted.one();
                    // The next kick sets it again; `stopping` is checked before the next run.
                    self.fd.set_kvm_immediate_exit(0);
                    self.is_between = true;
                    return Ok(None);
                }
                errno => Err(Cause::RunFailed { errno }),
            },
        };
        counters.other.one();
        other
    }

    /// Notes an access to a device, and returns the outcome if it ends the machine.
    fn accessed(&mut self, access: Access, answer: Answer) -> Option<Outcome> {
        self.last_access = Some(access);
        match answer {
            Answer::Served => None,
            Answer::Unclaimed => {
                self.shared.counters.vcpus[usize::from(self.index)]
                    .unclaimed
                    .one();
                None
            }
            Answer::End(outcome) => Some(outcome),
        }
    }
}

fn mmio(address: u64, size: usize, write: bool) -> Access {
    Access {
        space: Space::Mmio,
        write,
        address,
        size: size as u8,
    }
}

/// Handles `KVM_EXIT_IO`: `count` elements of `size` bytes, all to or from one port (a string
/// instruction moves many). The exit type of kvm-ioctls does not distinguish size and count.
fn port_access(run: &mut kvm_run, bus: &Bus, counters: &VcpuCounters) -> (Access, Answer) {
    // SAFETY: the exit reason is KVM_EXIT_IO, so this is the union's member.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size).max(1);
    let total = size * io.count as usize;
    let start = (&raw mut *run).cast::<u8>();
    // SAFETY: KVM puts the data at this offset of the mapping that `run` begins, all of it inside;
    // `run` is borrowed for as long as the slice is used, and is not used itself.
    let data = unsafe { slice::from_raw_parts_mut(start.add(io.data_offset as usize), total) };
    let write = u32::from(io.direction) != KVM_EXIT_IO_IN;
    let access = Access {
        space: Space::Port,
        write,
        address: io.port.into(),
        size: io.size,
    };
    let mut answer = Answer::Served;
    for element in data.chunks_exact_mut(size) {
        answer = if write {
            counters.port_writes.one();
            bus.port_write(io.port, element)
        } else {
            counters.port_reads.one();
            bus.port_read(io.port, element)
        };
        if let Answer::End(_) = answer {
            break;
        }
    }
    (access, answer)
}

fn internal_error(run: &mut kvm_run) -> Cause {
    // SAFETY: the exit reason is KVM_EXIT_INTERNAL_ERROR, so this is the union's member.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let given = (internal.ndata as usize).min(internal.data.len());
    Cause::InternalError {
        suberror: internal.suberror,
        data: internal.data[..given].to_vec(),
    }
}
