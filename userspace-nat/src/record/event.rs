//! The kinds of lines.
use serde::{Deserialize, Serialize};

/// What a line tells.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Event {
    /// A flow was admitted.
    FlowStart,
    /// A flow has ended.
    FlowEnd,
    /// A guest's DNS question was answered, or refused.
    Dns,
    /// New flows and questions were refused; several in one line.
    Refused,
}

impl Event {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::FlowStart, Self::FlowEnd, Self::Dns, Self::Refused];

    /// As lines and command lines have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FlowStart => "flow_start",
            Self::FlowEnd => "flow_end",
            Self::Dns => "dns",
            Self::Refused => "refused",
        }
    }
}

impl Serialize for Event {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Which kinds of lines a log has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Events(u8);

impl Events {
    /// Every kind.
    pub const ALL: Self = Self(0b1111);

    /// These.
    pub const fn of(events: &[Event]) -> Self {
        let mut set = 0;
        let mut at = 0;
        while at < events.len() {
            set |= 1 << events[at] as u8;
            at += 1;
        }
        Self(set)
    }

    /// Whether this one is among them.
    pub const fn has(self, event: Event) -> bool {
        self.0 & 1 << event as u8 != 0
    }
}

impl FromIterator<Event> for Events {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Self {
        Self(
            events
                .into_iter()
                .fold(0, |set, event| set | 1 << event as u8),
        )
    }
}
