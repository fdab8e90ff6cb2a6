//! What is said when a guest can't go on: what happened, what to do, and the CPU's state for the
//! person who has to find out why.
use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};

pub(crate) mod capture;
mod state;

/// Why and where a machine came to a bad end. [`fmt::Display`] gives it in full, in several lines.
#[derive(Clone, Debug)]
pub struct Report {
    /// The vCPU that met it.
    pub vcpu: u8,
    /// What happened.
    pub cause: Cause,
    /// The vCPU's registers, when KVM still gave them.
    pub registers: Option<Registers>,
    /// The instruction bytes from RIP on, as far as they can be read (at most 15); a fault may have
    /// been met later, and a program may have been changed since.
    pub code: Vec<u8>,
    /// The last access of this vCPU that a device of the VMM served before.
    pub last_access: Option<Access>,
}

/// What ended a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// `KVM_EXIT_SHUTDOWN`: an exception, while delivering an exception, while delivering one.
    TripleFault,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM can't go on.
    InternalError {
        /// `KVM_INTERNAL_ERROR_…`
        suberror: u32,
        /// What KVM gave with it; its meaning depends on the suberror.
        data: Vec<u64>,
    },
    /// `KVM_EXIT_FAIL_ENTRY`: the processor refused to enter the guest.
    FailedEntry {
        /// The processor's own code.
        hardware_reason: u64,
    },
    /// `KVM_EXIT_MEMORY_FAULT`: the host couldn't give the guest a page.
    MemoryFault {
        /// The guest physical address.
        address: u64,
    },
    /// `KVM_EXIT_SYSTEM_EVENT` of a kind that no PC has.
    SystemEvent {
        /// `KVM_SYSTEM_EVENT_…`
        kind: u32,
    },
    /// An exit that the VMM never asked for.
    UnknownExit {
        /// `KVM_EXIT_…`
        reason: u32,
    },
    /// `KVM_RUN` itself failed.
    RunFailed {
        /// The error number.
        errno: i32,
    },
    /// The thread that ran the vCPU panicked: the VMM has a bug.
    VmmPanicked,
}

/// The registers of a vCPU.
#[derive(Clone, Debug)]
pub struct Registers {
    /// General registers, RIP and RFLAGS.
    pub general: kvm_regs,
    /// Segments, tables, control registers and EFER.
    pub special: kvm_sregs,
}

/// An access that came to the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Port or memory.
    pub space: Space,
    /// Read or written.
    pub write: bool,
    /// Port number or guest physical address.
    pub address: u64,
    /// Bytes.
    pub size: u8,
}

/// Where an access goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// An I/O port.
    Port,
    /// An address without memory.
    Mmio,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the guest crashed on vCPU {}: {}", self.vcpu, self.cause)?;
        writeln!(f, "what to do: {}", self.cause.advice())?;
        if let Some(registers) = &self.registers {
            if registers.are_of_a_reset() {
                writeln!(
                    f,
                    "the registers are those of a reset CPU: on AMD, KVM resets it at a triple fault"
                )?;
            }
            write!(f, "{registers}")?;
        }
        if !self.code.is_empty() {
            write!(f, "code at rip:")?;
            for byte in &self.code {
                write!(f, " {byte:02x}")?;
            }
            writeln!(f)?;
        }
        if let Some(access) = self.last_access {
            writeln!(f, "last access to a device: {access}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::TripleFault => write!(
                f,
                "a triple fault: an exception for which the guest had no working handler, nor one for a double fault"
            ),
            Cause::InternalError { suberror, data } => {
                write!(f, "KVM gave up: {}", suberror_name(*suberror))?;
                if !data.is_empty() {
                    write!(f, "; data {:?}", Words(data))?;
                }
                Ok(())
            }
            Cause::FailedEntry { hardware_reason } => write!(
                f,
                "the processor refused to enter the guest (hardware reason {hardware_reason:#x})"
            ),
            Cause::MemoryFault { address } => write!(
                f,
                "the host could not give the guest its page at {address:#x}"
            ),
            Cause::SystemEvent { kind } => {
                write!(
                    f,
                    "KVM reported system event {kind}, which this machine has no use for"
                )
            }
            Cause::UnknownExit { reason } => {
                write!(
                    f,
                    "KVM left the guest for reason {reason}, which was never asked for"
                )
            }
            Cause::RunFailed { errno } => write!(
                f,
                "KVM could not run it: {}",
                std::io::Error::from_raw_os_error(*errno)
            ),
            Cause::VmmPanicked => write!(f, "the thread that ran it panicked"),
        }
    }
}

impl Cause {
    /// What a user can do about it.
    fn advice(&self) -> &'static str {
        match self {
            Cause::TripleFault => {
                "look at what the guest printed last; for Linux add `earlyprintk=serial,ttyS0 \
                 ignore_loglevel` to --cmdline. Early in the boot it is most often a kernel for \
                 another machine or an image cut short; without any output, check that --kernel is \
                 an x86-64 bzImage or vmlinux"
            }
            Cause::InternalError { suberror: 1, .. } => {
                "KVM met an instruction that it can't emulate: see the code at rip. It emulates \
                 where there is no memory behind an address (a wild pointer, or a device that is \
                 not there), in real mode, and, when the host is itself a virtual machine without \
                 nested virtualisation, all kernel code; a stock kernel does not run on such a host"
            }
            Cause::InternalError { .. } => {
                "look for a message of KVM's in the host's log (dmesg). If the host is itself a \
                 virtual machine, its hypervisor may be at fault: try on bare metal"
            }
            Cause::FailedEntry { .. } => {
                "look for a message of KVM's in the host's log (dmesg); the registers below are of \
                 a state that the processor does not allow"
            }
            Cause::MemoryFault { .. } => {
                "check the host's free memory and its log (dmesg): a page that was broken or could \
                 not be read back from swap looks like this"
            }
            Cause::RunFailed { .. } => "look for a message of KVM's in the host's log (dmesg)",
            Cause::SystemEvent { .. } | Cause::UnknownExit { .. } => {
                "report it, with this text: slipgate does not know what this host's KVM wanted"
            }
            Cause::VmmPanicked => "report it, with the panic's message: it is a bug of slipgate's",
        }
    }
}

/// The names in `linux/kvm.h`.
fn suberror_name(suberror: u32) -> String {
    match suberror {
        1 => "it can't emulate an instruction (suberror 1)".into(),
        2 => "exceptions met each other in a way it can't resolve (suberror 2)".into(),
        3 => "an exit while it was delivering an event (suberror 3)".into(),
        4 => "an exit of the processor that it does not know (suberror 4)".into(),
        other => format!("suberror {other}"),
    }
}

/// Hexadecimal words in one line.
struct Words<'a>(&'a [u64]);

impl fmt::Debug for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, word) in self.0.iter().enumerate() {
            write!(f, "{}{word:#x}", if place == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let space = match self.space {
            Space::Port => "port",
            Space::Mmio => "address",
        };
        let what = if self.write { "wrote" } else { "read" };
        write!(
            f,
            "{what} {} bytes at {space} {:#x}",
            self.size, self.address
        )
    }
}

#[cfg(test)]
#[path = "report_test.rs"]
mod tests;
