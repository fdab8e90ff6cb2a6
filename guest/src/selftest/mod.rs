//! The driver's and the device's agreement, walked through: `selftest` on the command line.
//!
//! # Theory of operation
//! Each check resets the card and brings it up the way it needs it, by hand, on CPU 0 and with one
//! queue pair (but for `queue_pairs`). To cause an interrupt it sends a frame: the device returns
//! the buffer. To be sent a frame it asks for a DHCP lease, which any network that a guest is put
//! on offers, and takes none. One JSON object per check is printed:
//! ```text
//! {"selftest":"msix_pending","ok":true}
//! {"selftest":"event_idx","ok":true,"lacks":"EVENT_IDX"}       the device does not offer it
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

/// What the checks work with.
pub struct Bench<'a, R, C, P> {
    /// The card.
    pub transport: &'a Transport<R>,
    /// Where its configuration space is.
    pub config: &'a C,
    /// The machine.
    pub platform: &'a P,
    /// The calling CPU's local APIC id.
    pub apic_id: u32,
    /// The interrupt that is the checks' own.
    pub interrupt: u8,
    /// How often the calling CPU has taken it.
    pub taken: fn() -> u64,
}

/// Why a check did not pass.
enum Miss {
    /// The device does not offer what is to be checked.
    Lacks(&'static str),
    /// It does, and wrongly.
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

/// Runs all checks, prints what came of each, and leaves the card reset. Whether none failed.
pub fn run<R: Registers + Clone, C: ConfigSpace, P: Platform>(bench: &Bench<'_, R, C, P>) -> bool {
    type Checks<'a, R, C, P> = [(&'static str, fn(&Bench<'a, R, C, P>) -> Check); 18];
    let checks: Checks<'_, R, C, P> = [
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
    // What a check left behind is no longer the device's when the next owner comes.
    all & bench.transport.reset().is_ok()
}
