//! Crash reports: the cause, advice to the user, and the CPU's state for diagnosis.
use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};

pub(crate) mod capture;
mod state;

/// Cause of a machine's crash and the state of the vCPU. [`fmt::Display`] prints it in full, in
/// several lines.
#[derive(Clone, Debug)]
pub struct Report {
    /// Number of the vCPU that crashed.
    pub vcpu: u8,
    /// Cause of the crash.
    pub cause: Cause,
    /// Registers of the vCPU; `None` if KVM no longer gives them.
    pub registers: Option<Registers>,
    /// Instruction bytes from RIP on, as far as they can be read (at most 15). The fault may have
    /// occurred at a later instruction, and the program may have changed since.
    pub code: Vec<u8>,
    /// Last access of this vCPU that a device of the VMM served.
    pub last_access: Option<Access>,
}

/// Cause of a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// `KVM_EXIT_SHUTDOWN`: a triple fault, that is an exception during the delivery of a double
    /// fault.
    TripleFault,
    /// `KVM_EXIT_INTERNAL_ERROR`: KVM can't continue.
    InternalError {
        /// Code of the error, `KVM_INTERNAL_ERROR_…`.
        suberror: u32,
        /// Data from KVM. Its meaning depends on the suberror.
        data: Vec<u64>,
    },
    /// `KVM_EXIT_FAIL_ENTRY`: the processor refused to enter the guest.
    FailedEntry {
        /// Error code of the processor.
        hardware_reason: u64,
    },
    /// `KVM_EXIT_MEMORY_FAULT`: the host couldn't give the guest a page.
    MemoryFault {
        /// Guest physical address of the page.
        address: u64,
    },
    /// `KVM_EXIT_SYSTEM_EVENT` of a kind that no PC has.
    SystemEvent {
        /// Code of the event, `KVM_SYSTEM_EVENT_…`.
        kind: u32,
    },
    /// Exit that the VMM did not enable.
    UnknownExit {
        /// Code of the exit, `KVM_EXIT_…`.
        reason: u32,
    },
    /// The call `KVM_RUN` failed.
    RunFailed {
        /// Error number from the kernel.
        errno: i32,
    },
    /// The thread that ran the vCPU panicked: the VMM has a bug.
    VmmPanicked,
}

/// Registers of a vCPU.
#[derive(Clone, Debug)]
pub struct Registers {
    /// General registers, RIP and RFLAGS.
    pub general: kvm_regs,
    /// Segments, tables, control registers and EFER.
    pub special: kvm_sregs,
}

/// Access of a vCPU to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Address space of the access.
    pub space: Space,
    /// True for a write, false for a read.
    pub write: bool,
    /// Port number or guest physical address.
    pub address: u64,
    /// Width of the access, bytes.
    pub size: u8,
}

/// Address space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Space of the I/O ports.
    Port,
    /// Guest physical addresses without memory.
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
    /// Returns advice to the user.
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

/// Returns the meaning of a suberror, by the codes in `linux/kvm.h`.
fn suberror_name(suberror: u32) -> String {
    match suberror {
        1 => "it can't emulate an instruction (suberror 1)".into(),
        2 => "exceptions met each other in a way it can't resolve (suberror 2)".into(),
        3 => "an exit while it was delivering an event (suberror 3)".into(),
        4 => "an exit of the processor that it does not know (suberror 4)".into(),
        other => format!("suberror {other}"),
    }
}

/// Words in hexadecimal, on one line.
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
