//! The roles of slipgate's processes.
use slipgate_control::users::USERS;

/// Which role; each has a user of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Engine,
    Vmm,
    Metrics,
}

const _: () = assert!((Role::Metrics as u32) < USERS);

impl Role {
    /// The hidden command.
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Vmm => "vmm",
            Self::Metrics => "metrics",
        }
    }

    /// The name that `ps` shows.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Engine => "slipgate-engine",
            Self::Vmm => "slipgate-vmm",
            Self::Metrics => "slipgate-metrics",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Engine => "the engine",
            Self::Vmm => "the VMM",
            Self::Metrics => "the metrics process",
        })
    }
}
