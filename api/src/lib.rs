//! The HTTP API of a slipgate daemon: VMs, flows, counters and events, as HTTP/1.1 and JSON on a
//! Unix socket.
//!
//! # Theory of operation
//! A process of its own, without privileges, serves one socket ([`server`]). What a client may do
//! is a property of the socket, and so of the process: the broker takes changes from the process
//! that serves the socket for changes alone, so a reader can change nothing, whatever it sends and
//! even if the process that reads it is compromised.
//!
//! A request is checked for form here ([`model`]) and becomes a typed message to the broker
//! ([`broker`]), which checks its meaning. Errors are problem details (RFC 9457, [`problem`]).
//! Flows and counters are read from the mapped tables by a [`Figures`], without the broker.
//!
//! Everything is bounded: connections, the length of heads and bodies, the time that a client may
//! take to send them, requests under way, and events that a slow reader has not taken
//! ([`events`]). A list of flows is made as its reader takes it ([`flows`]). The list of routes is one
//! table, of which router and OpenAPI document are made
//! ([`routes`], [`openapi`]).
pub mod broker;
mod capture;
mod conditions;
mod connection;
pub mod events;
pub mod flows;
mod handlers;
pub mod machines;
pub mod model;
pub mod openapi;
pub mod problem;
mod records;
mod response;
mod routes;
pub mod server;
mod stream;

pub use conditions::Conditions;
pub use handlers::change_of;
pub use response::OPENMETRICS;
use std::collections::BTreeMap;

use slipgate_ipc::engine::{EngineInventory, Silence};

/// Source of figures that need no other process: the tables that are mapped for reading.
pub trait Figures {
    /// Begins a list of the live flows, of one VM or of all.
    fn flows(&self, vm: Option<String>) -> Box<dyn flows::FlowList>;

    /// The counters as a JSON object. `inventory`: the data that only the engines have of VMs.
    fn stats(&self, inventory: &[EngineInventory]) -> serde_json::Value;

    /// How long VMs have been silent, by id.
    fn silences(&self) -> BTreeMap<u32, Silence>;

    /// The figures as Prometheus reads them.
    fn metrics(&self, inventory: &[EngineInventory]) -> String;
}
