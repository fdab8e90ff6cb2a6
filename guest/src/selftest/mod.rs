//! The self-test of the driver against the device: `selftest` on the command line.
//!
//! # Theory of operation
//! Each check resets the card and initialises it with the settings that it needs, on CPU 0 and with
//! one queue pair (but for `queue_pairs`). To cause an interrupt it sends a frame: the device
//! returns the buffer. To receive a frame it sends a DHCPDISCOVER, which a DHCP server on the
//! network answers, and takes no lease. One JSON object per check is printed:
//! ```text
//! {"selftest":"msix_pending","ok":true}
//! {"selftest":"event_idx","ok":true,"lacks":"EVENT_IDX"}   not offered, or a SHOULD not done
//! {"selftest":"reset","ok":false,"why":"…"}
//! ```
mod buffers;
mod control;
mod interrupts;
mod life;
mod question;
mod rig;

use alloc::string::String;

use crate::{
    json::Object,
    pci::{ConfigSpace, Registers},
    platform::Platform,
    virtio::{DeviceError, transport::Transport},
};

/// Devices and functions that the checks use.
pub struct Bench<'a, R> {
    /// Transport of the network card.
    pub transport: &'a Transport<R>,
    /// Access to the card's configuration space.
    pub config: &'a dyn ConfigSpace,
    /// Platform of the machine.
    pub platform: &'a dyn Platform,
    /// MAC address of a card that has none.
    pub own_mac: [u8; 6],
    /// Local APIC id of the calling CPU.
    pub apic_id: u32,
    /// Interrupt vector reserved for the checks.
    pub interrupt: u8,
    /// Returns how often the calling CPU has taken that interrupt.
    pub taken: fn() -> u64,
}

/// Reason why a check did not pass.
enum Miss {
    /// The device does not offer the feature to be checked, or does not do what it only should.
    Lacks(&'static str),
    /// The device behaves wrongly.
    Failed(String),
}

type Check = Result<(), Miss>;

impl From<DeviceError> for Miss {
    fn from(error: DeviceError) -> Self {
        Miss::Failed(alloc::format!("{error}"))
    }
}

impl From<&str> for Miss {
    fn from(why: &str) -> Self {
        Miss::Failed(why.into())
    }
}

impl From<String> for Miss {
    fn from(why: String) -> Self {
        Miss::Failed(why)
    }
}

/// Fails with a message unless the condition holds.
macro_rules! must {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::selftest::Miss::Failed(alloc::format!($($message)*)));
        }
    };
}
use must;

/// Runs all checks, prints the result of each, and leaves the card reset. Returns whether none
/// failed.
pub fn run<R: Registers + Clone>(bench: &Bench<'_, R>) -> bool {
    type Named<'a, R> = (&'static str, fn(&Bench<'a, R>) -> Check);
    let checks: [Named<'_, R>; 18] = [
        ("reset", life::reset),
        ("vectors", interrupts::vectors),
        ("msix_pending", interrupts::pending),
        ("msix_function_mask", interrupts::function_mask),
        ("no_interrupt_flag", interrupts::no_interrupt_flag),
        ("event_idx", interrupts::event_idx),
        ("plain_buffers", buffers::plain),
        ("chained_buffers", buffers::chained),
        ("indirect_buffers", buffers::indirect),
        ("mergeable_buffers", buffers::mergeable),
        ("checksum_offload", buffers::checksum),
        ("control_rx_mode", control::rx_mode),
        ("control_mac", control::mac),
        ("control_vlan", control::vlan),
        ("control_offloads", control::offloads),
        ("control_unknown", control::unknown),
        ("queue_pairs", control::queue_pairs),
        ("reset_and_again", life::reset_and_again),
    ];
    let mut all = true;
    for (name, check) in checks {
        let (well, note) = match check(bench) {
            Ok(()) => (true, None),
            Err(Miss::Lacks(what)) => (true, Some(("lacks", String::from(what)))),
            Err(Miss::Failed(why)) => (false, Some(("why", why))),
        };
        all &= well;
        let mut line = Object::about("selftest", name).truth("ok", well);
        if let Some((key, note)) = note {
            line = line.text(key, &note);
        }
        bench.platform.print_line(&line.into_line());
    }
    // After the reset, the device no longer uses the checks' memory.
    all & bench.transport.reset().is_ok()
}
