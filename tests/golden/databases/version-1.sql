BEGIN TRANSACTION;
CREATE TABLE aggregates (
	federation VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	artifact VARCHAR NOT NULL, 
	size INTEGER NOT NULL, 
	server_state VARCHAR NOT NULL, 
	stored_at FLOAT NOT NULL, 
	PRIMARY KEY (federation, round), 
	FOREIGN KEY(federation) REFERENCES federations (id)
);
INSERT INTO "aggregates" VALUES('casting',0,0,'0000000000000000000000000000000000000000000000000000000000000000',10,'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1.0);
INSERT INTO "aggregates" VALUES('casting',1,1,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',900,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',30.0);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('1');
CREATE TABLE api_tokens (
	id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	role VARCHAR NOT NULL, 
	secret_hash VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	revoked_at FLOAT, 
	last_used_at FLOAT, 
	PRIMARY KEY (id)
);
INSERT INTO "api_tokens" VALUES('0000000000000000','line lead','viewer','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',2.0,NULL,NULL,NULL);
CREATE TABLE attempts (
	federation VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	base VARCHAR NOT NULL, 
	opened_at FLOAT NOT NULL, 
	deadline_at FLOAT NOT NULL, 
	distilling_at FLOAT, 
	aggregate_stored_at FLOAT, 
	closed_at FLOAT, 
	reason VARCHAR NOT NULL, 
	PRIMARY KEY (federation, round, attempt), 
	FOREIGN KEY(federation) REFERENCES federations (id)
);
INSERT INTO "attempts" VALUES('casting',1,1,'closed','0000000000000000000000000000000000000000000000000000000000000000',10.0,110.0,20.0,30.0,30.0,'');
INSERT INTO "attempts" VALUES('casting',2,1,'collecting','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',31.0,131.0,NULL,NULL,NULL,'');
CREATE TABLE certificates (
	serial VARCHAR NOT NULL, 
	device VARCHAR NOT NULL, 
	issued_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	revoked_at FLOAT, 
	pem VARCHAR NOT NULL, 
	PRIMARY KEY (serial), 
	FOREIGN KEY(device) REFERENCES devices (id)
);
INSERT INTO "certificates" VALUES('a1','line-1',2.0,9000000000.0,NULL,'-----BEGIN CERTIFICATE-----
');
INSERT INTO "certificates" VALUES('a2','line-2',2.0,9000000000.0,50.0,'-----BEGIN CERTIFICATE-----
');
CREATE TABLE conditions (
	federation VARCHAR NOT NULL, 
	device VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	content VARCHAR NOT NULL, 
	PRIMARY KEY (federation, device), 
	FOREIGN KEY(federation) REFERENCES federations (id), 
	FOREIGN KEY(device) REFERENCES devices (id)
);
INSERT INTO "conditions" VALUES('casting','line-1',3.0,'{"findings":[{"check":"data","state":"warning"},{"check":"disk","state":"failed"}],"model":{"version":"0003","round":2,"serves":"int8","accuracy":0.5,"before":0.25,"forms":[{"name":"fp32","size":90000,"latency_ms":1.5,"accuracy":0.5,"agreement":1.0,"images":40},{"name":"int8","size":30000,"latency_ms":0.5,"accuracy":0.475,"agreement":0.95,"images":40}]}}');
CREATE TABLE devices (
	id VARCHAR NOT NULL, 
	public_key VARCHAR NOT NULL, 
	enrolled_at FLOAT NOT NULL, 
	last_seen_at FLOAT, 
	agent VARCHAR, 
	state VARCHAR NOT NULL, 
	ended_at FLOAT, 
	ended_because VARCHAR NOT NULL, 
	disabled_at FLOAT, 
	disabled_because VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "devices" VALUES('line-1','1111111111111111111111111111111111111111111111111111111111111111',2.0,3.0,'0.1.0','enrolled',NULL,'',NULL,'');
INSERT INTO "devices" VALUES('line-2','2222222222222222222222222222222222222222222222222222222222222222',2.0,NULL,NULL,'revoked',50.0,'stolen',NULL,'');
CREATE TABLE federations (
	id VARCHAR NOT NULL, 
	method VARCHAR NOT NULL, 
	spec VARCHAR NOT NULL, 
	policy VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	first_attempt INTEGER NOT NULL, 
	status VARCHAR NOT NULL, 
	status_reason VARCHAR NOT NULL, 
	continued_from VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "federations" VALUES('casting','fedcg','5555555555555555555555555555555555555555555555555555555555555555','{"rounds":3,"min_clients":2,"min_cohort":2,"fraction":1.0,"max_clients":null,"over_selection":0.0,"deadline_s":100.0,"max_attempts":2,"late":"drop","late_decay":0.5,"pace":"equal-steps","require_cohort":false,"stop_patience":null,"stop_gain":0.1}',1.0,1,'running','',NULL);
CREATE TABLE idempotency (
	"key" VARCHAR NOT NULL, 
	token VARCHAR NOT NULL, 
	request_hash VARCHAR NOT NULL, 
	status INTEGER NOT NULL, 
	body VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY ("key", token)
);
INSERT INTO "idempotency" VALUES('k','0000000000000000','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',200,'{}',4.0);
CREATE TABLE key_links (
	federation VARCHAR NOT NULL, 
	serial INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	old VARCHAR NOT NULL, 
	new VARCHAR NOT NULL, 
	signature VARCHAR NOT NULL, 
	made_at FLOAT NOT NULL, 
	PRIMARY KEY (federation, serial), 
	FOREIGN KEY(federation) REFERENCES federations (id)
);
INSERT INTO "key_links" VALUES('casting',1,2,'8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c','ed4928c628d1c2c6eae90338905995612959273a5c63f93636c14614ac8737d1','b981f244b7ebd4e4cfcc2f6b3ba324da1ab9815f7b9ca12f98f5952e49f0d0429b87e182c52620eb91c9a6c78261ec6ce6ff6686ed8b3372ecb5a9d9f5f28206',40.0);
CREATE TABLE leases (
	id INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "leases" VALUES(1,2);
CREATE TABLE masked_sums (
	federation VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	content VARCHAR NOT NULL, 
	PRIMARY KEY (federation), 
	FOREIGN KEY(federation) REFERENCES federations (id)
);
INSERT INTO "masked_sums" VALUES('casting',2,1,'{"phase":"keys"}');
CREATE TABLE participants (
	federation VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	client VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	share FLOAT NOT NULL, 
	accepted_at FLOAT, 
	predicted_s FLOAT, 
	PRIMARY KEY (federation, round, attempt, client), 
	FOREIGN KEY(federation) REFERENCES federations (id), 
	FOREIGN KEY(client) REFERENCES devices (id)
);
INSERT INTO "participants" VALUES('casting',1,1,'line-1','accepted','',1.0,NULL,NULL);
INSERT INTO "participants" VALUES('casting',1,1,'line-2','invited','',1.0,NULL,NULL);
INSERT INTO "participants" VALUES('casting',2,1,'line-1','invited','',1.0,NULL,NULL);
CREATE TABLE presence (
	federation VARCHAR NOT NULL, 
	device VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	online BOOLEAN NOT NULL, 
	reason VARCHAR DEFAULT '' NOT NULL, 
	PRIMARY KEY (federation, device, at), 
	FOREIGN KEY(federation) REFERENCES federations (id), 
	FOREIGN KEY(device) REFERENCES devices (id)
);
INSERT INTO "presence" VALUES('casting','line-1',3.0,1,'');
CREATE TABLE tokens (
	id VARCHAR NOT NULL, 
	secret_hash VARCHAR NOT NULL, 
	device VARCHAR, 
	replaces BOOLEAN NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT NOT NULL, 
	revoked_at FLOAT, 
	used_at FLOAT, 
	used_by VARCHAR, 
	used_for VARCHAR, 
	serial VARCHAR, 
	federation VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "tokens" VALUES('0000000000000000','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','line-3',0,2.0,9000000000.0,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE updates (
	federation VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	client VARCHAR NOT NULL, 
	artifact VARCHAR NOT NULL, 
	size INTEGER NOT NULL, 
	outcome VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	report VARCHAR, 
	manifest_at FLOAT NOT NULL, 
	stored_at FLOAT NOT NULL, 
	distances VARCHAR, 
	weight INTEGER, 
	figures VARCHAR, 
	facts VARCHAR, 
	PRIMARY KEY (federation, round, attempt, client), 
	FOREIGN KEY(federation) REFERENCES federations (id), 
	FOREIGN KEY(client) REFERENCES devices (id)
);
INSERT INTO "updates" VALUES('casting',1,1,'line-1','1111111111111111111111111111111111111111111111111111111111111111',1000,'accepted','','{"examples":12,"accuracy":0.5}',11.0,12.0,'{"classifier":1.5}',12,NULL,'{"threads":"2"}');
INSERT INTO "updates" VALUES('casting',1,1,'line-2','2222222222222222222222222222222222222222222222222222222222222222',1000,'accepted','','{"examples":12,"accuracy":0.5}',11.0,12.0,'{"classifier":1.5}',9,NULL,'{"threads":"2"}');
COMMIT;
