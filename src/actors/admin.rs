//! The admin port: Prometheus text on `/metrics`, health on `/healthz`.

use crate::actors::StartError;
use crate::actors::disk_tail::TailMetrics;
use crate::fabric::staging::Staging;
use crate::metrics::Metrics;
use crate::store::Store;
use actix_web::dev::ServerHandle;
use actix_web::{App, HttpResponse, HttpServer, web};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

/// What the port shows.
#[derive(Clone)]
pub struct Views {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub tails: Arc<TailMetrics>,
    pub staging: Vec<Staging>,
}

pub(super) fn bind(address: SocketAddr) -> Result<(String, TcpListener), StartError> {
    let failed = |source| StartError::Bind { url: format!("http://{address}"), source };
    let socket = TcpListener::bind(address).map_err(failed)?;
    let bound = socket.local_addr().map_err(failed)?;
    Ok((format!("http://{bound}/metrics"), socket))
}

pub(super) fn serve(socket: TcpListener, views: Views) -> io::Result<ServerHandle> {
    let server = HttpServer::new(move || {
        App::new()
            .app_data(web::Data::new(views.clone()))
            .route("/metrics", web::get().to(metrics))
            .route("/healthz", web::get().to(healthz))
    })
    .workers(1)
    .disable_signals()
    .listen(socket)?
    .run();
    let handle = server.handle();
    actix::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the admin port ended");
        }
    });
    Ok(handle)
}

async fn healthz() -> HttpResponse {
    HttpResponse::Ok().content_type("text/plain").body("ok\n")
}

async fn metrics(views: web::Data<Views>) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("application/openmetrics-text; version=1.0.0; charset=utf-8")
        .body(format!("{:?}", views.store.gauges()))
}
