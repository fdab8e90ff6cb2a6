//! Events that are recorded.
use serde::{Deserialize, Serialize};

/// Kind of a recorded event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Event {
    /// A flow was admitted.
    FlowStart,
    /// A flow has ended.
    FlowEnd,
    /// A guest's DNS question was answered, or refused.
    Dns,
    /// New flows and questions were refused; one line reports several.
    Refused,
}

impl Event {
    /// Every event, in order.
    pub const ALL: [Self; 4] = [Self::FlowStart, Self::FlowEnd, Self::Dns, Self::Refused];

    /// Returns the name used in records and on the command line.
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

/// A set of events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Events(u8);

impl Events {
    /// The set of all events.
    pub const ALL: Self = Self(0b1111);

    /// Creates a set of the given events.
    pub const fn of(events: &[Event]) -> Self {
        let mut set = 0;
        let mut at = 0;
        while at < events.len() {
            set |= 1 << events[at] as u8;
            at += 1;
        }
        Self(set)
    }

    /// Whether the set contains an event.
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
