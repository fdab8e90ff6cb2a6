//! The HTB queueing discipline of a device, by route netlink (`linux/pkt_sched.h`).

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};
use slipgate_abi::{
    IfIndex,
    rate::{PACED_BURST_NS, PACING_HANDLE, paced_ahead_ns, pacer_rate},
};

use crate::{Result, netlink::Requests};

const KIND: &str = "htb";
/// `TCA_OPTIONS`, whose value is a struct for the kinds that have one.
const TCA_OPTIONS: u16 = 2;
const TCA_HTB_PARMS: u16 = 1;
const TCA_HTB_INIT: u16 = 2;
const TCA_HTB_RATE64: u16 = 6;
const TCA_HTB_CEIL64: u16 = 7;
/// Version of the messages, which the kernel compares (`TC_HTB_PROTOVER`).
const VERSION: u32 = 3;
/// Without it the kernel wants a table of times as well.
const LINKLAYER_ETHERNET: u8 = 1;
/// A tick of the scheduler is 64 ns (`PSCHED_SHIFT`).
const TICK_SHIFT: u32 = 6;
/// Bytes that a class sends in its turn when several compete; larger than any frame.
const QUANTUM_BYTES: u32 = 131_072;
/// Most frames in a class: more than a CPU makes in the time that one may wait.
const QUEUED_FRAMES: u32 = 100_000;
/// Shortest frame that a limit charges, bytes: an IPv4 header behind one of Ethernet.
const SHORTEST_FRAME: u64 = 34;
/// Frames in a class beyond those that the limit lets wait: the engine's own, ARP and NDP answers.
const UNCHARGED_FRAMES: u64 = 1_000;

/// Our queueing discipline at a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    device: IfIndex,
}

/// A class of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    minor: u16,
    frame_bytes_per_second: u64,
    /// Frames that may wait.
    frames: u32,
}

impl Class {
    /// A class that lets packets go at a rate of L3 bytes.
    pub(super) fn new(minor: u16, bytes_per_second: u64) -> Self {
        Self {
            minor,
            frame_bytes_per_second: pacer_rate(bytes_per_second),
            frames: queued_frames(bytes_per_second),
        }
    }
}

impl Queue {
    pub(super) fn at(device: IfIndex) -> Self {
        Self { device }
    }

    /// Makes it in place of the kernel's own. One that is there already, ours or another, stays.
    /// `default_class`: where frames go that name none; 0: past all classes.
    pub(super) fn make(self, requests: &mut Requests, default_class: u16) -> Result<()> {
        let mut message = self.message(root(), TcHandle::ROOT, KIND);
        // struct tc_htb_glob: version, rate2quantum, defcls, debug, direct_pkts.
        let global = words([VERSION, 10, u32::from(default_class), 0, 0]);
        message
            .attributes
            .push(TcAttribute::Options(vec![option(TCA_HTB_INIT, global)]));
        let sent = requests.send(
            RouteNetlinkMessage::NewQueueDiscipline(message),
            NLM_F_CREATE | NLM_F_EXCL,
            "make a queue that shapes (does the kernel have sch_htb?)",
        );
        match sent {
            Err(error) if error.errno() == Some(libc::EEXIST) => Ok(()),
            other => other,
        }
    }

    /// Makes a class, or changes its rate.
    pub(super) fn set_class(self, requests: &mut Requests, class: Class) -> Result<()> {
        let handle = minor(class.minor);
        let mut message = self.message(handle, root(), KIND);
        let rate = class.frame_bytes_per_second;
        let options = vec![
            option(TCA_HTB_PARMS, parameters(rate)),
            option(TCA_HTB_RATE64, rate.to_ne_bytes().to_vec()),
            option(TCA_HTB_CEIL64, rate.to_ne_bytes().to_vec()),
        ];
        message.attributes.push(TcAttribute::Options(options));
        let request = RouteNetlinkMessage::NewTrafficClass(message);
        let what = "make a class of the queue that shapes";
        match requests.send(request.clone(), NLM_F_CREATE | NLM_F_EXCL, what) {
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                requests.send(request, NLM_F_CREATE, what)?;
            }
            other => other?,
        }
        self.lengthen(requests, handle, class.frames)
    }

    /// Gives a class a queue of our length: the kernel's is as long as the device's.
    fn lengthen(self, requests: &mut Requests, class: TcHandle, frames: u32) -> Result<()> {
        let mut message = self.message(TcHandle::UNSPEC, class, "pfifo");
        let limit = DefaultNla::new(TCA_OPTIONS, words([frames]));
        message.attributes.push(TcAttribute::Other(limit));
        requests.send(
            RouteNetlinkMessage::NewQueueDiscipline(message),
            NLM_F_CREATE | NLM_F_REPLACE,
            "make the queue of a class that shapes",
        )
    }

    /// Removes a class with the frames in it. One that is not there is no error.
    pub(super) fn remove_class(self, requests: &mut Requests, number: u16) -> Result<()> {
        let message = self.message(minor(number), root(), KIND);
        absent(requests.send(
            RouteNetlinkMessage::DelTrafficClass(message),
            0,
            "remove a class of the queue that shapes",
        ))
    }

    /// Removes it with all classes. The kernel compares the handle, so another one stays.
    pub(super) fn remove(self, requests: &mut Requests) -> Result<()> {
        let message = self.message(root(), TcHandle::ROOT, KIND);
        absent(requests.send(
            RouteNetlinkMessage::DelQueueDiscipline(message),
            0,
            "remove the queue that shapes",
        ))
    }

    fn message(self, handle: TcHandle, parent: TcHandle, kind: &str) -> TcMessage {
        let mut message = TcMessage::with_index(self.device.get() as i32);
        message.header.handle = handle;
        message.header.parent = parent;
        message.attributes.push(TcAttribute::Kind(kind.into()));
        message
    }
}

/// Frames that may wait in a class: no fewer than the limit lets wait, so that the queue drops none of
/// them, and not many more, because answers that nobody charges come to a guest that asks for them.
fn queued_frames(bytes_per_second: u64) -> u32 {
    let ahead_ns = u128::from(paced_ahead_ns(bytes_per_second));
    let bytes = u128::from(pacer_rate(bytes_per_second)) * ahead_ns / 1_000_000_000;
    let frames = bytes / u128::from(SHORTEST_FRAME) + u128::from(UNCHARGED_FRAMES);
    u32::try_from(frames).map_or(QUEUED_FRAMES, |frames| frames.min(QUEUED_FRAMES))
}

fn root() -> TcHandle {
    minor(0)
}

fn minor(minor: u16) -> TcHandle {
    TcHandle {
        major: PACING_HANDLE,
        minor,
    }
}

/// struct tc_htb_opt: two of struct tc_ratespec, buffers in ticks, quantum, level, prio.
fn parameters(rate: u64) -> Vec<u8> {
    let burst_ticks = (PACED_BURST_NS >> TICK_SHIFT) as u32;
    let mut bytes = Vec::new();
    for _ in ["rate", "ceil"] {
        // cell_log, linklayer, overhead, cell_align, mpu, rate.
        bytes.extend([0, LINKLAYER_ETHERNET, 0, 0, 0, 0, 0, 0]);
        bytes.extend(u32::try_from(rate).unwrap_or(u32::MAX).to_ne_bytes());
    }
    bytes.extend(words([burst_ticks, burst_ticks, QUANTUM_BYTES, 0, 0]));
    bytes
}

fn option(kind: u16, value: Vec<u8>) -> TcOption {
    TcOption::Other(DefaultNla::new(kind, value))
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Turns the errors of a removal into success if the object is missing or belongs to somebody else.
fn absent(sent: Result<()>) -> Result<()> {
    match sent {
        Err(error)
            if matches!(
                error.errno(),
                Some(libc::ENOENT | libc::ENODEV | libc::EINVAL)
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}
