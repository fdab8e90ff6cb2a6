//! A connection as the guest knows it, by the packets that it has sent and got.
use slipgate_vmm::virtio::vsock::WINDOW_BYTES;

use super::op;

/// Ports of a connection: the host's, and the guest's.
pub(super) type Ports = (u32, u32);

/// How far a connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// There is none.
    #[default]
    Closed,
    /// A program of the host asks for it.
    Asked,
    Open,
}

/// A packet that the guest has sent.
pub(super) struct Sent {
    /// The connection; `None`: it is of none.
    pub(super) ports: Option<Ports>,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) bytes: u32,
    pub(super) room: u32,
    pub(super) accepted: u32,
}

#[derive(Default)]
pub(super) struct Known {
    pub(super) stage: Stage,
    /// Number of the stream that the guest sends, and how much it has sent.
    pub(super) stream: u32,
    pub(super) made: u32,
    /// Bytes that the device has taken, and how many of them have gone on, as the device says.
    pub(super) taken: u32,
    announced: u32,
    /// The guest's room and what it said to have gone on, by the last packet that the device has
    /// taken.
    room: u32,
    accepted: u32,
    /// Whether the guest still sends and receives.
    sends: bool,
    pub(super) receives: bool,
    /// The guest broke a rule, or ended the connection: what is under way may be lost.
    pub(super) is_broken: bool,
    /// The guest has to be told that there is no connection.
    is_owed_rst: bool,
    /// Stream of the host's program, and how much has come.
    pub(super) program: Option<u32>,
    pub(super) got: u32,
}

impl Known {
    /// One that the guest may ask for.
    pub(super) fn own(stream: u32) -> Known {
        Known {
            stream,
            ..Known::default()
        }
    }

    /// One that a program asks for.
    pub(super) fn asked(stream: u32, program: u32) -> Known {
        Known {
            stage: Stage::Asked,
            stream,
            program: Some(program),
            ..Known::default()
        }
    }

    fn open(&mut self) {
        self.stage = Stage::Open;
        (self.sends, self.receives) = (true, true);
        self.is_broken = false;
        (self.taken, self.announced, self.got) = (0, 0, 0);
    }

    /// The device has taken a packet of the guest's.
    pub(super) fn taken(&mut self, sent: &Sent) {
        self.room = sent.room;
        self.accepted = sent.accepted;
        match (sent.op, self.stage) {
            (op::RESPONSE, Stage::Asked) => self.open(),
            (op::RW, Stage::Open) if self.sends => {
                // It may have gone on, and the guest was not told.
                self.is_broken |= self.untold() + u64::from(sent.bytes) > u64::from(WINDOW_BYTES);
                self.taken = self.taken.wrapping_add(sent.bytes);
            }
            (op::SHUTDOWN, Stage::Open) => {
                self.receives &= sent.flags & 1 == 0;
                self.sends &= sent.flags & 2 == 0;
            }
            (op::CREDIT_UPDATE | op::CREDIT_REQUEST, Stage::Open) => {}
            (op::REQUEST, Stage::Closed) => {
                self.program = None;
                self.taken = 0;
            }
            (op, _) => {
                self.stage = Stage::Closed;
                self.is_broken = true;
                self.is_owed_rst |= op != op::RST;
            }
        }
    }

    /// Bytes that the device has taken and did not say to have gone on.
    fn untold(&self) -> u64 {
        self.taken.wrapping_sub(self.announced).into()
    }

    /// The device answers the guest's request: a program is there.
    pub(super) fn answered(&mut self, program: u32) {
        assert_eq!(self.stage, Stage::Closed, "an answer without a request");
        self.program = Some(program);
        self.open();
    }

    /// The device says how many of the guest's bytes have gone on.
    pub(super) fn told(&mut self, forwarded: u32) {
        let held = self.taken.wrapping_sub(forwarded);
        assert!(held <= WINDOW_BYTES, "{held} bytes are held");
        self.announced = forwarded;
    }

    /// Bytes of the program have come. Returns the place in its stream.
    pub(super) fn came(&mut self, bytes: u32) -> u32 {
        assert_eq!(self.stage, Stage::Open);
        assert!(self.receives, "the guest receives no more");
        let from = self.got;
        let under_way = from.wrapping_sub(self.accepted);
        let needed = u64::from(under_way) + u64::from(bytes);
        assert!(needed <= self.room.into(), "beyond the guest's room");
        self.got = from.wrapping_add(bytes);
        from
    }

    /// The device has ended the connection. `program_stays`: the program did not end it.
    pub(super) fn ended(&mut self, program_stays: bool) {
        let guest_stays = !self.is_broken && (self.sends || self.receives);
        let for_nothing = self.stage == Stage::Open && program_stays && guest_stays;
        assert!(!for_nothing, "a connection that nobody has ended");
        self.stage = Stage::Closed;
        self.is_owed_rst = false;
    }

    /// Compares it with the device's, of which so many bytes are held; `None`: it is not open. All
    /// that ended it has told the guest so.
    pub(super) fn compare(&self, held: Option<usize>) {
        assert_eq!(self.stage == Stage::Open, held.is_some());
        assert!(!self.is_owed_rst, "the guest is not told of an end");
        let held = held.unwrap_or(0) as u64;
        assert!(held <= self.untold(), "more is said to have gone on");
    }
}
