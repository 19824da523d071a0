-- The statements of `load.cbr.rates` in the target database, for dataloader/pipelines/cbr.py.

-- name: is_there
SELECT to_regclass('cbr_rates') IS NOT NULL AS is_there;

-- name: create
CREATE TABLE IF NOT EXISTS cbr_rates (
  date date NOT NULL, currency text NOT NULL, nominal int NOT NULL, value numeric NOT NULL,
  rate numeric NOT NULL, updated_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (date, currency));

-- name: upsert
INSERT INTO cbr_rates AS old (date, currency, nominal, value, rate, updated_at)
VALUES (%s, %s, %s, %s, %s, now())
ON CONFLICT (date, currency) DO UPDATE
SET nominal = excluded.nominal, value = excluded.value, rate = excluded.rate, updated_at = excluded.updated_at
WHERE (old.nominal, old.value, old.rate) IS DISTINCT FROM (excluded.nominal, excluded.value, excluded.rate);
