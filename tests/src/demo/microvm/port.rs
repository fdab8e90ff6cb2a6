//! Frames from the engine port to the engine, recorded by a capture on the device.

use std::{collections::BTreeMap, time::Duration};

use slipgate_abi::portframe::{Handover, PORT_DEVICE, PortHeader};
use slipgate_testbed::{
    Capture, CapturedFrame, Error, NetNs, Result, World,
    frame::{Packet, tcp_flags},
    kernel_view,
};

const WAIT: Duration = Duration::from_secs(10);
/// Longer than the capture sleeps.
const SETTLED: Duration = Duration::from_millis(60);
const DNS: u16 = 53;
const DHCP: u16 = 67;

/// The port, watched from when it is there.
pub(super) struct Watched {
    device: String,
    capture: Capture,
}

/// Frames that had come out of the port by some moment.
pub(super) struct Carried {
    /// Kinds of the frames, in order.
    kinds: Vec<String>,
    /// Number of frames that the device itself counted.
    pub(super) counted: u64,
}

impl Watched {
    /// Waits for the namespace's first engine port. A guest needs longer to its first frame.
    pub(super) fn start(world: &World) -> Result<Watched> {
        let device = format!("{PORT_DEVICE}0");
        let until = std::time::Instant::now() + WAIT;
        while world.host.ifindex(&device).is_none() {
            if std::time::Instant::now() > until {
                return Err(Error::unexpected(format!("there is no {device}")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let capture = Capture::keeping(&world.host, &device)?;
        Ok(Watched { device, capture })
    }

    /// Returns the frames carried so far. No traffic may be in progress.
    pub(super) fn carried(&self, host: &NetNs) -> Result<Carried> {
        std::thread::sleep(SETTLED);
        let counted = kernel_view::frames_sent(host, &self.device)?;
        let frames = self.capture.frames();
        let to_engine = frames.iter().filter(|frame| frame.sent);
        Ok(Carried {
            kinds: to_engine.map(kind).collect(),
            counted,
        })
    }
}

impl Carried {
    /// Returns the number of frames.
    pub(super) fn frames(&self) -> u64 {
        self.kinds.len() as u64
    }

    /// Returns the number of frames of each kind, of those after `before`.
    pub(super) fn by_kind_since(&self, before: u64) -> BTreeMap<&str, u64> {
        let mut kinds = BTreeMap::new();
        for kind in self.kinds.iter().skip(before as usize) {
            *kinds.entry(kind.as_str()).or_default() += 1;
        }
        kinds
    }
}

/// Returns the kind of a frame: its protocol's name, else the reason why the kernel handed it over.
fn kind(frame: &CapturedFrame) -> String {
    let header = frame.bytes.first_chunk().and_then(PortHeader::decode);
    let Some(reason) = header.and_then(|header| Handover::from_u8(header.code)) else {
        return "not handed over".to_owned();
    };
    let Some(packet) = Packet::parse_ethernet(&frame.bytes) else {
        return match reason {
            Handover::Arp => "ARP".to_owned(),
            other => format!("{other:?}"),
        };
    };
    let (tcp, to) = (packet.tcp_flags(), packet.destination.port());
    match (reason, tcp, to) {
        (Handover::Dhcp, _, DHCP) => "DHCP".to_owned(),
        (_, _, DNS) => "DNS".to_owned(),
        (_, Some(flags), _) if flags & tcp_flags::SYN != 0 => "SYN".to_owned(),
        (_, Some(_), _) if !packet.payload().is_empty() => "TCP data".to_owned(),
        (_, Some(_), _) => format!("other TCP ({reason:?})"),
        (_, None, _) if packet.protocol == 1 => "first echo".to_owned(),
        _ => format!("{reason:?}"),
    }
}
