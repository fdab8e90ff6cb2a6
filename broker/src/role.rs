//! The roles of slipgate's processes.
use slipgate_control::users::USERS;

/// Which role; each has a user of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Engine,
    Vmm,
    Metrics,
    /// Answers the API on the socket for changes.
    Api,
    /// Answers the API on the socket for reading.
    ApiReader,
}

const _: () = assert!((Role::Api as u32) < USERS);

impl Role {
    /// Which of a broker's users it runs as. A daemon runs no VMM, whose user its API for readers
    /// has.
    pub(crate) fn user(self) -> u32 {
        match self {
            Self::ApiReader => Self::Vmm as u32,
            other => other as u32,
        }
    }

    /// Name of the hidden subcommand.
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Vmm => "vmm",
            Self::Metrics => "metrics",
            Self::Api | Self::ApiReader => "api",
        }
    }

    /// The name that `ps` shows.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Engine => "slipgate-engine",
            Self::Vmm => "slipgate-vmm",
            Self::Metrics => "slipgate-metrics",
            Self::Api => "slipgate-api",
            Self::ApiReader => "slipgate-api-read",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Engine => "the engine",
            Self::Vmm => "the VMM",
            Self::Metrics => "the metrics process",
            Self::Api => "the API",
            Self::ApiReader => "the API for readers",
        })
    }
}
