//! The process that answers the API, with `--api` of `slipgate serve` and of user mode.
//!
//! It maps the shared tables for reading, gives up their descriptors, and keeps that memory, the
//! listening socket and the channel to the broker ([`crate::sandbox::servers`]). What it serves is in
//! [`slipgate_api`]; what it reads of the tables is what `slipgate flows` and `slipgate stats` do.
use std::{collections::BTreeMap, os::unix::net::UnixListener, rc::Rc};

use anyhow::bail;
use serde_json::Value;
use slipgate_api::{
    Figures,
    flows::FlowList,
    server::{self, Settings},
};
use slipgate_control::{layout::MAPS, maps::ReadOnlyMaps};
use slipgate_ipc::{api::ToApi, engine::EngineInventory};
use slipgate_model::Silence;

use super::{inherited_channel, metrics::page};
use crate::{
    args::ChildArgs,
    log,
    sandbox::servers::{self, Server},
    show::{
        flows::InParts,
        names::Known,
        stats::{self, Which},
    },
};

/// Runs until the broker is gone.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let broker = nix::unistd::getppid();
    let channel = inherited_channel("api", args.fd)?;
    let Some(ToApi::Start(start)) = channel.receive()? else {
        bail!("the broker ended before it sent the API's settings");
    };
    log::to_stderr(&start.log)?;
    if start.maps.len() != MAPS {
        bail!("the broker sent {} maps of {MAPS}", start.maps.len());
    }
    let settings = Settings {
        listener: UnixListener::from(start.listener),
        channel,
        figures: Box::new(Tables {
            maps: ReadOnlyMaps::from_fds(start.maps)?.into(),
            shown: page::Shown {
                owner_rows: start.owner_rows,
                label_keys: start.label_keys,
            },
        }),
        may_change: start.may_change,
    };
    server::run(settings, || {
        servers::enter(Server::Api, broker, args.user)?;
        tracing::debug!("the API is served");
        anyhow::Ok(())
    })
}

/// Tables of the NAT, mapped read-only.
struct Tables {
    maps: Rc<ReadOnlyMaps>,
    /// Rows and figures that the metrics show.
    shown: page::Shown,
}

impl Figures for Tables {
    fn flows(&self, vm: Option<String>) -> Box<dyn FlowList> {
        Box::new(InParts::new(self.maps.clone(), vm))
    }

    fn stats(&self, inventory: &[EngineInventory]) -> Value {
        let mut stats = stats::read(&self.maps, Which::without_links());
        stats.add_known(known(inventory));
        serde_json::to_value(stats).unwrap_or_default()
    }

    fn silences(&self) -> BTreeMap<u32, Silence> {
        stats::silences(&self.maps)
    }

    fn metrics(&self, inventory: &[EngineInventory]) -> String {
        page::make(&self.maps, &self.shown, &known(inventory))
    }
}

fn known(inventory: &[EngineInventory]) -> Known {
    let mut known = Known::default();
    inventory.iter().cloned().for_each(|page| known.add(page));
    known
}
